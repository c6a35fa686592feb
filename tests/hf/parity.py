# SPDX-License-Identifier: Apache-2.0
"""Our decoder and transformers' DeepseekV4ForCausalLM on the same weights and tokens, in float32: logits and every parameter gradient.

    python -m tests.hf.parity --out docs/parity.md

writes the table of all cases; the tests assert its bounds. The path under test is the whole one: checkpoint, export, `from_pretrained`.
Sinks, position biases, router biases, norms and hyper-connection maps are moved off their initial values, YaRN blends within the rotary dims, and
hash tables are real ones (the class starts them at zero). Sixteen index heads: with few of them relu makes exact ties at score 0, and which of two
tied entries is selected is open.
"""

from __future__ import annotations

import argparse
import functools
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from csa_model.config import ExperimentConfig, HyperConnectionsConfig, ModelConfig, MoEConfig, MTPConfig, RopeScaling
from csa_model.decoder import Decoder
from csa_model.hf import export
from csa_model.hf.names import from_checkpoint
from csa_model.run_dir import plain
from kernels import PackedLayout
from tests.model.helpers import SPARSE, build, next_of, random_tokens, tiny_config

KINDS = {"window": (0, 0), "CSA": (4, 4), "HCA": (8, 8), "mixed": (0, 4, 8, 4)}  # each: a hash-routed layer first, then scored ones
LENGTHS = (1, 3, 4, 5, 17, 37, 64, 160)  # at 160, 40 entries are visible and 3 are selected
LOGIT_BOUND, GRADIENT_BOUND = 1e-5, 1e-4


@dataclass(frozen=True)
class Row:
    """One line of the table. Losses: mean cross entropy of random targets, nats. gradient: worst parameter, max |difference| / max |value|."""

    kind: str
    length: int
    ours: float
    theirs: float
    logit: float
    gradient: float
    parameter: str
    parameters: int  # that have a gradient


def model_of(kind: str) -> ModelConfig:
    """No public value is the class's default, so that none can be forgotten in config.json; SwiGLU clamps at 1, where it matters."""
    ratios = KINDS[kind]
    return tiny_config(
        num_hidden_layers=len(ratios),
        compress_ratios=(*ratios, 0),
        index_n_heads=16,
        rope_theta=5_000.0,
        compress_rope_theta=90_000.0,
        rope_scaling=RopeScaling(factor=8.0, original_max_position_embeddings=256, beta_fast=20.0, beta_slow=2.0),
        rms_norm_eps=1e-5,
        initializer_range=0.03,
        hyper_connections=HyperConnectionsConfig(hc_mult=3 if kind == "CSA" else 5 if kind == "HCA" else 4, hc_sinkhorn_iters=7, hc_eps=1e-5),
        moe=MoEConfig(  # the class's grouped GEMM wants rows of 16 bytes
            n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=16, num_hash_layers=1, routed_scaling_factor=2.0, swiglu_limit=1.0
        ),
        mtp=MTPConfig(coefficient=0.2),
    )


def save_checkpoint(decoder: Decoder, path: Path) -> Path:
    config = ExperimentConfig(model=decoder.config)
    state = {f"decoder.{name}": value for name, value in decoder.state_dict().items()}
    torch.save({"state_dict": state, "hyper_parameters": {"config": plain(config)}, "global_step": 1}, path)
    return path


@functools.cache
def pair(kind: str) -> tuple[Decoder, Any, dict[str, Tensor]]:
    """Our decoder, the class loaded from its export, and the exported tensors."""
    from safetensors.torch import load_file
    from transformers import DeepseekV4ForCausalLM

    decoder = build(model_of(kind), seed=3)
    with tempfile.TemporaryDirectory() as folder:
        export(save_checkpoint(decoder, Path(folder) / "a.ckpt"), Path(folder) / "hf", with_tokenizer=False)
        model, info = DeepseekV4ForCausalLM.from_pretrained(Path(folder) / "hf", output_loading_info=True, dtype=torch.float32)
        tensors = load_file(Path(folder) / "hf" / "model.safetensors")
    assert not any(info.values()), info
    return decoder, model.train(), tensors  # dropout is 0; training mode takes no cache


def compare(kind: str, length: int) -> Row:
    """Forward and backward of the trunk on both sides from one random cotangent."""
    decoder, model, _ = pair(kind)
    tokens = random_tokens(length, seed=length)
    ours = decoder.logits(decoder(tokens, PackedLayout.from_lengths([length]), SPARSE).hidden)
    theirs = model(tokens[None], use_cache=False).logits[0]
    _backward(ours, theirs, decoder, model)
    return _row(kind, ours, theirs, {n: p for n, p in decoder.named_parameters() if not n.startswith("mtp.")}, _gradients(model))


def compare_mtp(length: int) -> Row:
    """The MTP block against one made of the class's own layer and hyper-connection head; only norms and the two projections are written here."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperHead

    decoder, model, tensors = pair("mixed")
    tokens = random_tokens(length, seed=length)
    following = next_of(tokens, [length])
    output = decoder(tokens, PackedLayout.from_lengths([length]), SPARSE, next_tokens=following)
    assert output.mtp_hidden is not None
    ours = decoder.logits(output.mtp_hidden)

    state: list[Tensor] = []
    hook = model.model.hc_head.register_forward_pre_hook(lambda module, inputs: state.append(inputs[0]))
    model.model(tokens[None], use_cache=False)
    hook.remove()
    block = _layer_of_class(model.config, tensors)
    head = DeepseekV4HyperHead(model.config)
    head.load_state_dict({f"hc_{part}": tensors[f"mtp.0.hc_head_{part}"] for part in ("fn", "base", "scale")})
    loose = {name: tensors[f"mtp.0.{name}.weight"].clone().requires_grad_() for name in ("e_proj", "h_proj", "enorm", "hnorm", "norm")}

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + decoder.config.rms_norm_eps) * weight

    ids, rows = following.clamp(min=0)[None], torch.arange(length)
    joined = normed(model.model.embed_tokens(ids), loose["enorm"]) @ loose["e_proj"].T
    x = joined[:, :, None] + normed(state[0], loose["hnorm"]) @ loose["h_proj"].T
    hidden = (rows[None] > rows[:, None]) | (rows[None] <= rows[:, None] - decoder.config.sliding_window)
    mask = torch.zeros(length, length).masked_fill(hidden, -torch.inf)[None, None]
    angles = {"main": model.model.rotary_emb(x[:, :, 0], position_ids=rows[None], layer_type="main")}
    x = block(x, input_ids=ids, position_embeddings=angles, position_ids=rows[None], attention_mask=mask)
    theirs = model.lm_head(normed(head(x), loose["norm"]))[0]

    _backward(ours, theirs, decoder, model)
    expected = _gradients(model) | {f"mtp.{n.removeprefix('layers.0.')}": g for n, g in _gradients(block, "layers.0.").items()}
    expected |= {f"mtp.{n}": g for n, g in _gradients(head, "hc_head.").items()} | {f"mtp.{n}.weight": _or_zero(p) for n, p in loose.items()}
    return _row("mixed + MTP", ours, theirs, dict(decoder.named_parameters()), expected)


def _layer_of_class(config: Any, tensors: dict[str, Tensor]) -> Any:
    """A window layer with scored experts of the class, with the exported MTP weights."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4DecoderLayer

    changes = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
    config = type(config).from_dict({**config.to_dict(), **changes})
    config._attn_implementation = "eager"
    block = DeepseekV4DecoderLayer(config, 0)
    given = from_checkpoint({name: value for name, value in tensors.items() if name.startswith("mtp.0.")})
    state = {}
    for name, value in block.state_dict().items():
        parts = [given[f"mtp.{n.removeprefix('layers.0.')}"] for n in from_checkpoint({f"layers.0.{name}": value})]
        state[name] = torch.cat(parts, dim=1) if len(parts) == 2 else parts[0]  # w1 and w3 are one tensor there
    block.load_state_dict(state)
    return block


def _backward(ours: Tensor, theirs: Tensor, decoder: Decoder, model: Any) -> None:
    length = len(ours)
    cotangent = torch.randn(ours.shape, generator=torch.Generator().manual_seed(length)) / length
    decoder.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    (ours * cotangent).sum().backward()
    (theirs * cotangent).sum().backward()


def _gradients(module: Any, prefix: str = "") -> dict[str, Tensor]:
    """Gradients of a module of the class under our names; zeros where there is none."""
    return from_checkpoint({prefix + name: _or_zero(parameter) for name, parameter in module.named_parameters()})


def _or_zero(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


def _row(kind: str, ours: Tensor, theirs: Tensor, parameters: dict[str, Tensor], expected: dict[str, Tensor]) -> Row:
    assert set(parameters) == set(expected), set(parameters) ^ set(expected)
    worst, where, count = 0.0, "-", 0
    for name, parameter in parameters.items():
        mine = _or_zero(parameter)
        scale = max(float(mine.abs().max()), float(expected[name].abs().max()))
        if scale == 0:  # entries that do not exist yet, and indexers, which no loss on logits reaches
            continue
        count += 1
        error = float((mine - expected[name]).abs().max()) / scale
        if error >= worst:
            worst, where = error, name
    targets = random_tokens(len(ours), seed=1000 + len(ours))
    losses = [float(F.cross_entropy(logits.detach().double(), targets)) for logits in (ours, theirs)]
    return Row(kind, len(ours), *losses, float((ours - theirs).detach().abs().max()), worst, where, count)


def all_rows() -> list[Row]:
    return [compare(kind, length) for kind in KINDS for length in LENGTHS] + [compare_mtp(length) for length in LENGTHS]


HEADER = f"""# Parity with transformers

Our decoder and `transformers.DeepseekV4ForCausalLM` on the same weights and the same random tokens, in float32 on a CPU. The weights go the whole
way: checkpoint, `python -m csa_model.hf export`, `from_pretrained`. Sinks, position biases, router biases, norms and hyper-connection maps are
random, YaRN is active, hash tables are real, the first layer of each model is hash-routed and the others are scored. From length 17 on, the top-k
selection leaves visible entries out.

- loss: mean cross entropy of random targets, nats per token, from our logits and from theirs.
- logits: largest absolute difference; the tests demand at most {LOGIT_BOUND:g}.
- gradients: largest over all parameters of max |difference| / max |value| from one random cotangent of the logits; the tests demand at most
  {GRADIENT_BOUND:g}. The parameter named is the worst one; the count says how many parameters have a gradient at that length.
- The class builds no MTP block. Ours is compared with one made of the class's own window layer and hyper-connection head.

Written by `make parity`; sections of other versions of transformers are kept.
"""


def section(rows: list[Row]) -> str:
    import transformers

    lines = [f"## transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}", ""]
    lines += ["| layers | length | our loss | their loss | logits | gradients | worst parameter | parameters |", "|---|---|---|---|---|---|---|---|"]
    for r in rows:
        cells = (r.kind, r.length, f"{r.ours:.7f}", f"{r.theirs:.7f}", f"{r.logit:.1e}", f"{r.gradient:.1e}", f"`{r.parameter}`", r.parameters)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    worst = max(rows, key=lambda r: r.logit), max(rows, key=lambda r: r.gradient)
    at = [f"({row.kind}, {row.length})" for row in worst]
    lines += ["", f"Worst: logits {worst[0].logit:.1e} {at[0]}, gradients {worst[1].gradient:.1e} {at[1]}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="docs/parity.md")
    path = Path(parser.parse_args().out)
    torch.set_num_threads(1)
    new = section(all_rows())
    old = re.split(r"(?m)^(?=## transformers )", path.read_text())[1:] if path.is_file() else []
    kept = [part.rstrip("\n") + "\n" for part in old if part.split(",")[0] != new.split(",")[0]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([HEADER, *sorted([*kept, new])]))
    print(new)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
