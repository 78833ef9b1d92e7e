"""TorchTitan's training stack for PyTorch Lightning: `Trainer(strategy=TitanStrategy(...))`, or `strategy="titan"`."""

from lightning.pytorch.strategies import StrategyRegistry

from titan_strategy.module import TitanModule
from titan_strategy.pipeline_split import PipelineConfig
from titan_strategy.plan import ParallelPlan
from titan_strategy.strategy import TitanStrategy

__all__ = ["ParallelPlan", "PipelineConfig", "TitanModule", "TitanStrategy"]

if "titan" not in StrategyRegistry:
    StrategyRegistry.register(
        "titan", TitanStrategy, description="FSDP2, HSDP, tensor, pipeline and expert parallelism with exact losses"
    )
