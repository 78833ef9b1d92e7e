"""Learning-rate factors at the steps where a schedule changes its course."""

import pytest

from models.schedules import LearningRateSchedule, constant, cosine, wsd


def test_warmup_starts_above_zero_and_reaches_the_peak_on_the_step_after_it() -> None:
    assert [constant(step, warmup_steps=4) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])


def test_no_warmup_starts_at_the_peak() -> None:
    assert constant(0, warmup_steps=0) == 1
    assert wsd(0, 10, 0, 0.5, 0.0) == 1
    assert cosine(0, 10, 0, 0.0) == 1


def test_wsd_corners() -> None:
    factors = {step: wsd(step, 100, 10, 0.2, 0.1) for step in (0, 10, 79, 80, 81, 90, 99, 100, 1000)}
    expected = {0: 1 / 11, 10: 1, 79: 1, 80: 1, 81: 1 - 0.9 / 20, 90: 0.55, 99: 0.1 + 0.9 / 20, 100: 0.1, 1000: 0.1}
    assert factors == pytest.approx(expected)


def test_wsd_without_decay_holds_to_the_last_step() -> None:
    assert wsd(99, 100, 10, 0.0, 0.1) == 1


def test_wsd_takes_the_smaller_factor_where_warmup_overlaps_decay() -> None:
    factors = [wsd(step, 10, 9, 1.0, 0.0) for step in range(11)]
    assert factors == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1, 0])


def test_cosine_corners() -> None:
    factors = {step: cosine(step, 110, 10, 0.2) for step in (0, 10, 60, 110, 500)}
    assert factors == pytest.approx({0: 1 / 11, 10: 1, 60: 0.6, 110: 0.2, 500: 0.2})


def test_warmup_longer_than_the_run() -> None:
    for schedule in (LearningRateSchedule("wsd", 100), LearningRateSchedule("cosine", 100)):
        assert schedule.factor(0, 5) == pytest.approx(1 / 101)
        assert all(0 < schedule.factor(step, 5) <= 1 for step in range(6))


def test_schedule_picks_the_function() -> None:
    assert LearningRateSchedule("wsd", 10, 0.2, 0.1).factor(90, 100) == wsd(90, 100, 10, 0.2, 0.1)
    assert LearningRateSchedule("cosine", 10, 0.2, 0.1).factor(90, 100) == cosine(90, 100, 10, 0.1)
    assert LearningRateSchedule("constant", 10).factor(90, float("inf")) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "linear"}, "'linear' must be wsd, cosine or constant"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be at least 0"),
        ({"decay_fraction": 1.5}, "decay_fraction=1.5 must lie between 0 and 1"),
        ({"min_lr_ratio": -0.1}, "min_lr_ratio=-0.1 must lie between 0 and 1"),
    ],
)
def test_bad_values_are_named(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearningRateSchedule(**values)  # type: ignore[arg-type]
