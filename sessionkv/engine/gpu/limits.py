"""Which models the GPU's kernels take, asked before anything is allocated."""

from __future__ import annotations

from sessionkv.errors import ModelUnsupported
from sessionkv.kernels.attention_arguments import MAX_GROUP, MAX_HEAD_DIM
from sessionkv.kernels.fused_norm import MAX_WIDTH
from sessionkv.kernels.sampling_scan import MAX_VOCAB
from sessionkv.model.spec import ModelSpec


def check_model(spec: ModelSpec) -> None:
    """Refuse what the kernels do not take.

    Raises:
        ModelUnsupported: Naming what, and the way out.
    """
    group = spec.num_heads // spec.num_kv_heads
    for name, value, allowed, fits in (
        (
            "head_dim",
            spec.head_dim,
            f"multiples of 16 up to {MAX_HEAD_DIM}",
            spec.head_dim % 16 == 0 and spec.head_dim <= MAX_HEAD_DIM,
        ),
        ("query heads a key head", group, f"up to {MAX_GROUP}", group <= MAX_GROUP),
        ("vocab_size", spec.vocab_size, f"up to {MAX_VOCAB}", spec.vocab_size <= MAX_VOCAB),
        ("hidden_size", spec.hidden_size, f"up to {MAX_WIDTH}", spec.hidden_size <= MAX_WIDTH),
    ):
        if not fits:
            raise ModelUnsupported(
                f"the model's {name} is {value}; supported on a GPU: {allowed}. "
                'With device = "cpu" the model can be computed',
                field=name,
                value=value,
            )
