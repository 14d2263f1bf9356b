"""Auxiliary losses of routers: gradients of equal samples in every packing and layout, and against their formulas."""

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from megarl.config.megatron import MegatronConfig, MoeConfig
from megarl.config.trainer import RecomputeConfig
from tests.megatron.fidelity.measure import as_trajectory, assert_same_gradients
from tests.megatron.fidelity.models import CONFIGS
from tests.megatron.fidelity.reference import _load, draw
from tests.megatron.rank_models import collect_gradients, gather_full, make_trainer, model_spec, trainer_spec
from tests.megatron.ranks import run_ranks, sample

SCOPES = ("micro_batch", "sequence", "global_batch")
LOSSES = (*SCOPES, "z_loss")
EXACT = 1e-6
"""Norm of the difference of gradients that are equal but for rounding, relative to their norm."""

EQUAL = draw((37,), 331) * 6
UNEQUAL = draw((3, 120, 17, 64, 9, 41), 331)
PACKINGS = (
    ((0, 1, 2, 3, 4, 5),),
    ((0,), (1,), (2,), (3,), (4,), (5,)),
    ((0, 1, 2, 3, 4, 5), (), (), ()),
    ((), (5,), (), (0, 1, 2, 3), (4,)),
    ((4, 1, 2), (0, 3, 5)),
)
"""Micro-batches as indices into six sequences; replicas take them in turn."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss whose gradients are measured."""

    path: str
    loss: str
    sequences: Any = EQUAL
    packings: Any = PACKINGS
    parallel: dict[str, int] = field(default_factory=dict)
    recompute: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self):
        scope = self.loss if self.loss in SCOPES else "micro_batch"
        moe = MoeConfig(aux_loss_coeff=float(self.loss in SCOPES), aux_loss_scope=scope)
        megatron = MegatronConfig(model={} if self.loss in SCOPES else {"moe_z_loss_coeff": 1.0})
        recompute = RecomputeConfig(**self.recompute)
        return model_spec(self.path, self.parallel, moe=moe, megatron=megatron, recompute=recompute)


def make_packs(model, sequences, micro_batches):
    """Return this replica's micro-batches."""
    rank, dp = model.groups.dp.rank(), model.groups.dp.size()
    own = [*micro_batches, *[()] * (-len(micro_batches) % dp)][rank::dp]
    return [model.pack([as_trajectory(sequences[i]) for i in indices]) for indices in own]


def differentiate_on_rank(cases):
    """Return, for each case, the gradients of its loss alone in each of its packings; cases differ in little else."""
    results, trainers = [], {}
    for case in cases:
        if case.loss not in trainers:
            trainers[case.loss] = make_trainer(trainer_spec(case.spec, distributed=False))
        trainer, of_case = trainers[case.loss], []
        from megarl.megatron.modeling.megatron_model import zero_loss

        for micro_batches in case.packings:
            for chunk in trainer.ddp_chunks:
                chunk.zero_grad_buffer()
            packs = make_packs(trainer.model, case.sequences, micro_batches)
            trainer.model.forward_backward(packs, zero_loss, ddp_chunks=trainer.ddp_chunks)
            of_case.append(gather_full(trainer.model, collect_gradients(trainer)))
        results.append(of_case)
    return results


def of_routers(gradients):
    return {name: gradient for name, gradient in gradients.items() if name.endswith("mlp.gate.weight")}


@pytest.fixture(scope="module")
def one_rank(model_folder, tmp_path_factory):
    """Gradients by loss and packing on one rank: of equal samples, of unequal ones, and of padding alone."""
    path, folder = model_folder("qwen3_moe"), tmp_path_factory.mktemp("one")
    kinds = ((EQUAL, PACKINGS), (UNEQUAL, PACKINGS), (EQUAL, (((), ()),)))
    cases = [Case(path=path, loss=loss, sequences=of, packings=in_) for of, in_ in kinds for loss in LOSSES]
    results = iter(run_ranks(differentiate_on_rank, 1, folder, cases))
    return [dict(zip(LOSSES, results, strict=False)) for _ in kinds]


def assert_close(got, want, tolerance=EXACT):
    for name, gradient in of_routers(want).items():
        norm, difference = float(gradient.norm()), float((got[name] - gradient).norm())
        assert norm > 1e-3
        assert difference <= tolerance * norm, (name, difference / norm)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_equal_samples_do_not_depend_on_packs(loss, one_rank):
    first, *others = one_rank[0][loss]
    for other in others:
        assert_close(other, first)


@pytest.mark.parametrize("loss", ["sequence", "z_loss"])
def test_gradients_of_unequal_samples_do_not_depend_on_packs(loss, one_rank):
    first, *others = one_rank[1][loss]
    for other in others:
        assert_close(other, first)


@pytest.mark.parametrize("loss", LOSSES)
def test_padding_alone_has_no_gradient(loss, one_rank):
    (gradients,) = one_rank[2][loss]
    assert all(bool((gradient == 0).all()) for gradient in gradients.values())


LAYOUTS = {
    "tp2": (2, {"tp": 2}, {}),
    "cp2": (2, {"cp": 2}, {}),
    "ep2": (2, {"ep": 2}, {}),
    "tp2 ep2 etp1": (2, {"tp": 2, "ep": 2, "etp": 1}, {}),
    "dp2 recomputed": (2, {}, {"granularity": "full"}),
    "tp2 recomputed experts": (2, {"tp": 2}, {"granularity": "selective", "modules": ("moe",)}),
    "pp2": (2, {"pp": 2}, {}),
    "pp2 vpp2 recomputed": (2, {"pp": 2, "vpp": 2}, {"granularity": "full"}),
    "pp2 vpp2 ep2 cp2": (4, {"pp": 2, "vpp": 2, "ep": 2, "cp": 2}, {}),
    "tp2 pp2 recomputed": (4, {"tp": 2, "pp": 2}, {"granularity": "selective", "modules": ("moe",)}),
    "tp2 cp2 dp2 ep2": (8, {"tp": 2, "cp": 2, "ep": 2}, {}),
}


@pytest.mark.parametrize("layout", sample(LAYOUTS, ["dp2 recomputed", "pp2 vpp2 ep2 cp2"]))
def test_gradients_do_not_depend_on_the_layout(layout, one_rank, model_folder, tmp_path):
    world, parallel, recompute = LAYOUTS[layout]
    path, equal, unequal = model_folder("qwen3_moe"), PACKINGS[3:], PACKINGS[3:4]
    fields = {"path": path, "parallel": parallel, "recompute": recompute}
    cases = [Case(loss=loss, packings=equal, **fields) for loss in LOSSES]
    cases += [Case(loss=loss, sequences=UNEQUAL, packings=unequal, **fields) for loss in ("sequence", "z_loss")]
    results = run_ranks(differentiate_on_rank, world, tmp_path, cases)
    for case, of_case in zip(cases, results, strict=True):
        want = one_rank[case.sequences is UNEQUAL][case.loss][0]
        for got in of_case:
            assert_close(got, want)
            assert_same_gradients(got, want)  # those of other weights, through the hidden states


def router_logits(model, sequences):
    """Return the logits of each layer with experts [n, E] for each sequence of n tokens: [sequence][layer]."""
    found = []
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda _, __, output: found.append(output[0])) for gate in gates]
    out = []
    for tokens in sequences:
        model(torch.tensor(tokens)[None], use_cache=False)
        out.append(found[:])
        found.clear()
    for hook in hooks:
        hook.remove()
    return out


def scores_and_choices(logits_tE, config):
    """Return scores that sum to 1 and 1 for each chosen expert, [t, E] each."""
    if config["model_type"] == "deepseek_v3":
        scores_tE = logits_tE.sigmoid()
        scores_tE = scores_tE / scores_tE.sum(1, keepdim=True)
    else:
        scores_tE = logits_tE.softmax(1)
    indices_tk = scores_tE.topk(config["num_experts_per_tok"]).indices
    return scores_tE, F.one_hot(indices_tk, scores_tE.shape[1]).sum(1).float()


def reference_loss(loss, logits, rounds, config):
    """Return the loss of one layer by its formula.

    Args:
        logits: of each sequence, [n, E].
        rounds: the micro-batches that the replicas compute at the same time, as indices of sequences.
    """
    num_tokens = sum(len(logits[i]) for micro_batches in rounds for indices in micro_batches for i in indices)
    total, seen = torch.zeros(()), []
    for micro_batches in rounds:
        seen += [i for indices in micro_batches for i in indices]
        for indices in micro_batches:
            for group in [[i] for i in indices] if loss == "sequence" else [indices] if indices else []:
                logits_tE = torch.cat([logits[i] for i in group])
                if loss == "z_loss":
                    total = total + logits_tE.exp().sum(1).log().square().mean() * len(logits_tE) / num_tokens
                    continue
                counted = torch.cat([logits[i] for i in seen]) if loss == "global_batch" else logits_tE
                fraction_E = scores_and_choices(counted, config)[1].mean(0) / config["num_experts_per_tok"]
                probability_E = scores_and_choices(logits_tE, config)[0].mean(0)
                value = len(fraction_E) * (fraction_E.detach() * probability_E).sum()
                total = total + value * len(logits_tE) / num_tokens
    return total


def reference_gradients(path, config, loss, sequences, rounds):
    """Return the gradients of the routers' weights, of the loss summed over layers."""
    model = _load(path)
    of_layers = zip(*router_logits(model, sequences), strict=True)
    sum(reference_loss(loss, logits, rounds, config) for logits in of_layers).backward()
    return {name: of.grad for name, of in model.named_parameters() if name.endswith("mlp.gate.weight")}


def in_rounds(micro_batches, dp):
    return [micro_batches[i : i + dp] for i in range(0, len(micro_batches), dp)]


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_unequal_samples_follow_the_formula(loss, one_rank, model_folder):
    path, config = model_folder("qwen3_moe"), CONFIGS["qwen3_moe"]
    for packing, got in zip(PACKINGS, one_rank[1][loss], strict=True):
        want = reference_gradients(path, config, loss, UNEQUAL, in_rounds(packing, 1))
        assert_close(got, want, 1e-4)


REPLICAS = [("qwen3_moe", {"ep": 2, "cp": 2}, 4, 2), ("deepseek_v3", {"ep": 2}, 2, 2)]


@pytest.mark.parametrize(("name", "parallel", "world", "dp"), REPLICAS, ids=["qwen3_moe", "deepseek_v3"])
def test_gradients_on_several_replicas_follow_the_formula(name, parallel, world, dp, model_folder, tmp_path):
    path, config = model_folder(name), CONFIGS[name]
    cases = [
        Case(path=path, loss=loss, sequences=UNEQUAL, packings=PACKINGS[2:4], parallel=parallel) for loss in LOSSES
    ]
    for case, of_case in zip(cases, run_ranks(differentiate_on_rank, world, tmp_path, cases), strict=True):
        for packing, got in zip(case.packings, of_case, strict=True):
            assert_close(got, reference_gradients(path, config, case.loss, UNEQUAL, in_rounds(packing, dp)), 1e-4)


@torch.no_grad()
def test_formula_of_one_micro_batch_is_that_of_transformers(model_folder):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model, config = _load(model_folder("qwen3_moe")), CONFIGS["qwen3_moe"]
    experts, top_k = config["num_experts"], config["num_experts_per_tok"]
    lengths, longest = [len(tokens) for tokens in UNEQUAL], max(map(len, UNEQUAL))
    mask = torch.tensor([[1] * n + [0] * (longest - n) for n in lengths])
    ids = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in UNEQUAL])
    padded = model(ids, attention_mask=mask, output_router_logits=True).router_logits
    for logits, alone in zip(padded, zip(*router_logits(model, UNEQUAL), strict=True), strict=True):
        # transformers counts the experts of a token one by one
        want = load_balancing_loss_func((logits,), experts, top_k, mask) / top_k
        got = reference_loss("micro_batch", alone, [[range(len(UNEQUAL))]], config)
        assert float(got) == pytest.approx(float(want), rel=1e-5)


def count_choices_on_rank(path, parallel):
    """Return the tokens of each expert that the bias of DeepSeek's routers would be updated from, by layer."""
    trainer = make_trainer(trainer_spec(model_spec(path, parallel), distributed=False))
    from megarl.megatron.modeling.megatron_model import zero_loss
    from megarl.megatron.modeling.router import find_routers

    trainer.model.config.finalize_model_grads_func = None  # it resets the counts
    packs = make_packs(trainer.model, UNEQUAL, PACKINGS[3])
    trainer.model.forward_backward(packs, zero_loss, ddp_chunks=trainer.ddp_chunks)
    counts = [router.local_tokens_per_expert for router in find_routers(c.module for c in trainer.model.chunks)]
    for each in counts:
        torch.distributed.all_reduce(each)
    return counts


def test_padding_does_not_count_for_the_expert_bias(model_folder, tmp_path):
    name = "deepseek_v3"
    counts = run_ranks(count_choices_on_rank, 2, tmp_path, model_folder(name), {"cp": 2})
    assert len(counts) == 3
    for each in counts:
        assert float(each.sum()) == CONFIGS[name]["num_experts_per_tok"] * sum(map(len, UNEQUAL))


def routers_of_te_specs(path):
    """Return the classes of layers and routers with Transformer Engine, and whether the layer has experts."""
    trainer = make_trainer(trainer_spec(model_spec(path)))
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megarl.megatron.modeling.layer_spec import te_block_spec

    with patch("megatron.core.models.gpt.gpt_layer_specs.TESpecProvider", TESpecProvider):
        block = te_block_spec(trainer.model.config, vp_stage=None)
    mlps = [layer.submodules.mlp for layer in block.layer_specs]
    routers = [mlp.keywords["submodules"].router.__name__ for mlp in mlps if mlp.func is MoELayer]
    return [layer.module.__name__ for layer in block.layer_specs], routers


def test_layers_of_transformer_engine_have_the_same_routers(model_folder, tmp_path):
    layers, routers = run_ranks(routers_of_te_specs, 1, tmp_path, model_folder("qwen3_moe"))
    assert layers == ["PackLayer"] * 4
    assert routers == ["PackRouter"] * 3
