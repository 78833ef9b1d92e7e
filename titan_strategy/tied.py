"""Parameters that share storage: whether they still do when the model has been split."""

from collections import defaultdict

from torch import nn


def tied_names(root: nn.Module) -> list[list[str]]:
    """The names of each parameter that has more than one."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return [group for group in names.values() if len(group) > 1]


def check_tied(root: nn.Module, tied: list[list[str]]) -> None:
    """Raise ValueError unless the parameters of each group in `tied` are one still."""
    now = dict(root.named_parameters(remove_duplicate=False))
    for group in tied:
        if len({now.get(name) for name in group}) > 1:
            raise ValueError(
                f"{' and '.join(group)} share storage, but lie in parts of the model that are split one by one: they "
                "would become separate parameters. Embedding and head may be tied if the plan names the two parameters "
                "in `tied`; blocks must not share any."
            )
