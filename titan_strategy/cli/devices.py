"""Stand-ins for GPUs that this machine does not have, so that a run for another machine can be checked here."""

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from typing_extensions import override


def absent_gpus(accelerator: Any, devices: Any) -> "AbsentGpus | None":
    """The accelerator to build a Trainer with that starts nothing; None where the machine has what is asked for.

    Raises:
        ValueError: If `devices` leaves the number of GPUs to a machine that has none.
    """
    if accelerator not in ("gpu", "cuda"):
        return None
    try:
        count = AbsentGpus.count(devices)
    except ValueError:
        if torch.cuda.is_available():
            return None
        raise ValueError(
            f"trainer.devices={devices!r} takes the GPUs that there are, and this machine has none. Say how many the "
            "run will have, e.g. --trainer.devices 8."
        ) from None
    return None if count <= torch.cuda.device_count() else AbsentGpus()


class AbsentGpus(Accelerator):
    """CUDA devices by number, never touched."""

    @staticmethod
    def count(devices: Any) -> int:
        """How many GPUs a value of `Trainer(devices=...)` means.

        Raises:
            ValueError: If it means all that there are, or nothing.
        """
        numbers = devices if isinstance(devices, list) else str(devices).strip("[] ").split(",")
        if len(numbers) > 1 or isinstance(devices, list):
            return len(numbers)
        if (count := int(numbers[0])) < 1:
            raise ValueError(f"devices={devices!r}")
        return count

    @override
    def setup_device(self, device: torch.device) -> None:
        raise AssertionError("these devices do not exist")

    @override
    def teardown(self) -> None:
        pass

    @staticmethod
    @override
    def parse_devices(devices: Any) -> int:
        return AbsentGpus.count(devices)

    @staticmethod
    @override
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("cuda", index) for index in range(devices)]

    @staticmethod
    @override
    def auto_device_count() -> int:
        return 0

    @staticmethod
    @override
    def is_available() -> bool:
        return True

    @staticmethod
    @override
    def name() -> str:
        return "cuda"
