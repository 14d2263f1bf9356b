"""Helpers of functions that run on test ranks (`ranks.py`): models, trainers, this rank's requests, gathering.

megatron-core is imported within the functions, since the process that starts the ranks must not import it unprepared.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers.dispatch import LocalPayload
from megarl.config.rollout import WeightSyncConfig
from megarl.config.trainer import OptimizerConfig, ParallelConfig
from megarl.megatron.request_samples import split_by_dp, split_forward_by_dp
from megarl.megatron.requests import ForwardRequest, ModelSpec, PushRequest, SyncSetup, TrainerSpec, TrainRequest
from megarl.model_files.weight_index import stored_shape
from tests.megatron.ranks import CollectingSink


def model_spec(path: str, parallel: ParallelConfig | Mapping[str, Any] | None = None, **fields: Any) -> ModelSpec:
    """Describe a model in float32 unless `fields` has another dtype; `parallel` may be the sizes that are not 1."""
    sizes = parallel if isinstance(parallel, ParallelConfig) else ParallelConfig(**(parallel or {}))
    return ModelSpec(**{"model_path": path, "dtype": "float32", "parallel": sizes, **fields})


def trainer_spec(model: ModelSpec, *, steps: int = 10, **optimizer: Any) -> TrainerSpec:
    """Describe a trainer; `optimizer` has the fields of its optimizer."""
    return TrainerSpec(model=model, optimizer=OptimizerConfig(**optimizer), optimizer_steps=steps)


def make_model(spec: ModelSpec) -> Any:
    """Return this rank's part of the model."""
    from megarl.megatron.runtime import platform

    platform.prepare()
    from megarl.megatron.modeling.megatron_model import MegatronModel

    return MegatronModel(spec)


def make_trainer(spec: TrainerSpec) -> Any:
    """Return this rank's part of the trainer."""
    from megarl.megatron.runtime import platform

    platform.prepare()
    from megarl.megatron.training.trainer import MegatronTrainer

    return MegatronTrainer(spec)


def own_part(model: Any, request: TrainRequest | ForwardRequest) -> Any:
    """Return this rank's part of a request."""
    grid = RankGrid.of(model.spec.parallel, dist.get_world_size())
    split = split_by_dp if isinstance(request, TrainRequest) else split_forward_by_dp
    return split(request, grid)[dist.get_rank()]


def assert_same_bits(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    """Check that tensors of the same names are equal."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    assert [name for name, tensor in want.items() if not torch.equal(got[name], tensor)] == []


def gather(value: Any) -> list[Any]:
    """Return `value` of every rank."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def gather_metrics(model: Any, metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics of the first replica's output rank, which alone are complete."""
    return gather(metrics)[RankGrid.of(model.spec.parallel, dist.get_world_size()).output_rank(0)]


def train_step(trainer: Any, request: TrainRequest) -> dict[str, float]:
    """Take one step of a trainer, or of a trainer worker; return its complete metrics."""
    model = trainer.model
    return gather_metrics(model, trainer.train_step(own_part(model, request)).metrics)


def trained_parameters(model: Any) -> dict[str, Any]:
    """Return this rank's parameters under the local names of its layout."""
    parameters = (parameter for chunk in model.chunks for parameter in chunk.module.parameters())
    of = {parameter.data_ptr(): parameter for parameter in parameters if parameter.requires_grad}
    return {name: of[tensor.data_ptr()] for name, tensor in model.tensors().items() if tensor.data_ptr() in of}


def collect_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Return this rank's gradients under the local names of its layout."""
    from megarl.megatron.local_layout import local_view

    map_of = trainer.model.architecture.parameter_map
    return {
        name: local_view(map_of(name), parameter.main_grad.clone())
        for name, parameter in trained_parameters(trainer.model).items()
    }


def sync_weights(worker: Any) -> dict[str, torch.Tensor]:
    """Sync the weights of a trainer worker; return those that rank 0 sends."""
    sink, config = CollectingSink(), WeightSyncConfig(strategy="gather_hf", bucket_bytes=20_000)
    worker.prepare_sync(LocalPayload(SyncSetup(config=config, senders=(0,))))
    worker.push_weights(PushRequest(sinks={0: (sink,)}))
    return sink.tensors


def record_gradients(trainer: Any) -> list[dict[str, torch.Tensor]]:
    """Return a list to which every update of the trainer appends this rank's gradients, before they are clipped."""
    recorded: list[dict[str, torch.Tensor]] = []
    prepare = trainer.optimizer.prepare_grads

    def record_then_prepare() -> Any:
        recorded.append(collect_gradients(trainer))
        return prepare()

    trainer.optimizer.prepare_grads = record_then_prepare
    return recorded


def gather_full(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return, on rank 0, full Hugging Face tensors from the shards of all ranks; replicas are equal up to rounding."""
    full_tensors: dict[str, torch.Tensor] = {}
    shards = gather((model.layout, tensors))
    for layout, rank_tensors in shards if dist.get_rank() == 0 else ():
        for piece in layout.pieces:
            if piece.local not in rank_tensors:
                continue
            local = rank_tensors[piece.local][tuple(slice(*b) for b in piece.local_box)]
            empty = torch.full(layout.tensors[piece.tensor].shape, torch.nan).to(local)
            full = full_tensors.setdefault(piece.tensor, empty)
            target = full[tuple(slice(*b) for b in piece.box)]
            if not target.isnan().any():
                assert torch.allclose(local, target, rtol=1e-5, atol=1e-6), f"ranks disagree about {piece.tensor}"
            target.copy_(local)
    for name, tensor in full_tensors.items():
        assert not tensor.isnan().any(), f"no rank holds all of {name}"
    return {name: tensor.view(stored_shape(name, tuple(tensor.shape))) for name, tensor in full_tensors.items()}
