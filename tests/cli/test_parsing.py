"""What the command line accepts: numbers, nested settings, presets; and what it says of anything else."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cli.modules import SmallModule
from titan_strategy.cli import TitanCLI
from titan_strategy.cli.presets import find_config, presets

Parse = Callable[..., TitanCLI]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Parse:
    """Parses arguments and builds model, data and trainer, but runs nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["titan"])
    monkeypatch.setattr(TitanCLI, "_run_subcommand", lambda self, subcommand: None)

    def run(*args: str, config: object = None) -> TitanCLI:
        if config is not None:
            Path("config.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
            args = ("--config", "config.yaml", *args)
        model = () if config is not None else ("--model", "tests.cli.modules.SmallModule")
        return TitanCLI(["fit", "--trainer.accelerator", "cpu", *model, *args])

    return run


def _model(**init_args: object) -> dict[str, object]:
    return {"model": {"class_path": "tests.cli.modules.SmallModule", "init_args": init_args}}


def test_exponents_without_a_point_are_numbers(parse: Parse) -> None:
    yaml_text = """
        model:
          class_path: tests.cli.modules.SmallModule
          init_args: {lr: 1e-4, betas: [9e-1, .95], constants: {lr: 1e5, steps: 3}}
        trainer: {gradient_clip_val: 1e-1, limit_val_batches: 5e-1}
    """
    cli = parse("--model.constants.steps=7", config=yaml_text)
    assert isinstance(cli.model, SmallModule)
    assert (cli.model.lr, cli.model.betas) == (1e-4, (0.9, 0.95))
    assert cli.model.constants is not None
    assert (cli.model.constants.lr, cli.model.constants.steps) == (1e5, 7)
    assert cli.trainer.gradient_clip_val == 0.1
    assert cli.trainer.limit_val_batches == 0.5


def test_exponent_on_the_command_line_is_a_number(parse: Parse) -> None:
    cli = parse("--model.lr", "3e-4")
    assert isinstance(cli.model, SmallModule)
    assert cli.model.lr == 3e-4


def test_a_float_for_an_integer_is_an_error_that_names_the_key(
    parse: Parse, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("--trainer.max_steps", "1e3")
    error = capsys.readouterr().err
    assert "trainer.max_steps" in error
    assert "1000.0" in error


@pytest.mark.parametrize(
    ("config", "unknown", "meant"),
    [
        ({**_model(), "trainer": {"max_stepz": 1}}, "trainer.max_stepz", "max_steps"),
        ({**_model(), "modle": 1}, "modle", None),
        (_model(widht=3), "widht", "width"),
        (_model(constants={"stepz": 1}), "stepz", "steps"),
        ({**_model(), "data": {"class_path": "tests.cli.modules.SmallData", "init_args": {"row": 1}}}, "row", "rows"),
        (
            {
                **_model(),
                "trainer": {
                    "strategy": {"class_path": "titan_strategy.TitanStrategy", "init_args": {"cpu_ofload": True}}
                },
            },
            "cpu_ofload",
            "cpu_offload",
        ),
        (
            {
                **_model(),
                "trainer": {
                    "strategy": {
                        "class_path": "titan_strategy.TitanStrategy",
                        "init_args": {"plan": {"blocks": "layers.*", "befor": ["embedding"]}},
                    }
                },
            },
            "befor",
            "before",
        ),
        (
            {"model": {"class_path": "models.CausalLM", "init_args": {"preset": "debug", "overrides": {"n_layer": 1}}}},
            "n_layer",
            "n_layers",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_unknown_keys_are_errors_that_name_the_key(
    parse: Parse, capsys: pytest.CaptureFixture[str], config: object, unknown: str, meant: str | None
) -> None:
    with pytest.raises(SystemExit):
        parse(config=config)
    error = capsys.readouterr().err
    assert f"'{unknown}'" in error
    if meant is not None:
        assert f"Did you mean '{meant}'?" in error


def test_unknown_arguments_are_errors(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--trainer.max_stepz", "1")
    error = capsys.readouterr().err
    assert "unrecognized arguments: --trainer.max_stepz" in error
    assert "Did you mean 'max_steps'?" in error
    assert len(error.splitlines()) < 10, "the message is buried in usage"


def test_strategy_with_nested_plan(parse: Parse) -> None:
    from titan_strategy import ParallelPlan, TitanStrategy

    strategy = {
        "class_path": "titan_strategy.TitanStrategy",
        "init_args": {
            "data_parallel_replicate_size": 1,
            "timeout": "0:05:00",
            "plan": {"blocks": "net.layers.*", "before": ["net.embedding"], "after": ["net.norm", "net.head"]},
        },
    }
    cli = parse(config={**_model(), "trainer": {"strategy": strategy, "devices": 2}})
    assert isinstance(cli.trainer.strategy, TitanStrategy)
    plan = ParallelPlan(blocks="net.layers.*", before=("net.embedding",), after=("net.norm", "net.head"))
    assert cli.trainer.strategy._plan == plan


def test_strategy_by_shorthand(parse: Parse) -> None:
    from titan_strategy import TitanStrategy

    assert isinstance(parse("--trainer.strategy", "titan").trainer.strategy, TitanStrategy)


def test_tensorboard_flag_adds_a_logger_beside_csv(parse: Parse) -> None:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    assert [type(logger) for logger in parse().trainer.loggers] == [CSVLogger]
    loggers = parse("--tensorboard").trainer.loggers
    assert [type(logger) for logger in loggers] == [CSVLogger, TensorBoardLogger]
    assert loggers[0].log_dir == loggers[1].log_dir


@pytest.mark.parametrize("spelling", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml"])
def test_presets_are_found_by_name(spelling: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config(spelling) == str(presets()["quickstart"])


def test_a_users_own_file_wins_over_a_preset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.yaml").write_text("{}")
    assert find_config("quickstart.yaml") == "quickstart.yaml"
    assert find_config("quickstart") == str(presets()["quickstart"])


def test_missing_config_is_an_error_that_lists_the_presets(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--config", "quickstrat")
    error = capsys.readouterr().err
    assert "'quickstrat' is neither a file nor a preset" in error
    assert all(name in error for name in presets())


@pytest.mark.parametrize("name", presets())
def test_every_preset_parses(name: str, parse: Parse) -> None:
    cli = TitanCLI(["fit", "--config", name, "--trainer.accelerator", "cpu", "--trainer.devices", "8"])
    assert cli.datamodule is not None
