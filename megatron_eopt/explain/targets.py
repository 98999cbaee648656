"""Where a checkpoint can be loaded; docs/checkpoints.md has the reasons."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from megatron_eopt.base.names import MAIN_OF_REPLICATED, MAIN_OF_SHARDED, MOMENT2
from megatron_eopt.checkpoint import fsdp_dtensor
from megatron_eopt.explain import rank_files
from megatron_eopt.explain.distributed import BY_BUCKET, TORCH_DIST
from megatron_eopt.explain.saved import Saved

type VerdictT = Literal["yes", "no", "not tested"]

_DIST = f"--ckpt-format {TORCH_DIST}"
_SHARDED = "--use-distributed-optimizer"
_FSDP = "--use-megatron-fsdp --use-distributed-optimizer"
_FRESH = "--checkpoint-fresh-state"
_NO_STATE = "the model alone: --no-load-optim"


@dataclass(frozen=True)
class Target:
    """One way to load a checkpoint.

    Attributes:
        where: Storage, layout or optimizer.
        verdict: Whether it loads there.
        how: The flag to use, or what to do instead.
    """

    where: str
    verdict: VerdictT
    how: str


def targets_of(saved: Saved) -> tuple[Target, ...]:
    """Return what can be done with a checkpoint."""
    has_state = any(entry.kind is not None for entry in saved.entries)
    if saved.format == rank_files.FORMAT:
        return _same_layout(saved)
    if saved.format == fsdp_dtensor.FORMAT:
        return _of_megatron_fsdp()
    if saved.format != TORCH_DIST:
        return _of_torch()
    if not has_state:
        return (Target("any layout, any storage", "yes", f"{_DIST}; {_NO_STATE}"),)
    return _by_bucket(saved) if saved.form == BY_BUCKET else _by_parameter(saved)


def _by_parameter(saved: Saved) -> tuple[Target, ...]:
    size = saved.tensor_parallel
    of_matrices = {str(entry.kind) for entry in saved.entries if entry.of_matrix}
    if saved.slabs:
        layouts: tuple[Target, ...] = (
            Target(f"tensor parallelism {size}, any other DP, PP, EP", "yes", _DIST),
            Target(
                "another tensor parallelism",
                "no",
                f"state belongs to {size} slabs; {_anew(of_matrices)}",
            ),
        )
    else:
        layouts = (Target("any tensor, pipeline, expert and data parallelism", "yes", _DIST),)
    # the storages that read each other's, or torch FSDP2 its own
    own = bool(saved.argument("use_torch_fsdp2"))
    usual: VerdictT = "not tested" if own else "yes"
    fsdp2: VerdictT = "yes" if own else "not tested"
    sharded = Target("sharded storage", usual, _SHARDED)
    plain = Target("plain storage", usual, f"without {_SHARDED}")
    # Muon's statistics are put together for any storage
    if (others := of_matrices - {MOMENT2}) and not own:
        how = f"matrices that are fused or cut are others there; {_anew(others)}"
        if saved.slabs or saved.argument("use_distributed_optimizer") is False:
            sharded = replace(sharded, verdict="no", how=how)
        elif saved.argument("use_distributed_optimizer"):
            plain = replace(plain, verdict="no", how=how)
        else:
            how = f"if it wrote this; in the other one {how}"
            sharded, plain = (
                replace(each, verdict="not tested", how=how) for each in (sharded, plain)
            )
    return (
        *layouts,
        sharded,
        plain,
        Target("torch FSDP2 in Megatron's trainer", fsdp2, "--use-torch-fsdp2"),
        Target("Megatron-FSDP", "no", f"it takes {fsdp_dtensor.FORMAT}"),
        *_other_optimizers(saved),
    )


def _anew(kinds: Iterable[str]) -> str:
    return f"to start it fresh: {_FRESH} {' '.join(sorted(kinds))}"


def _by_bucket(saved: Saved) -> tuple[Target, ...]:
    other = f"{_NO_STATE}; to load at any layout write --dist-ckpt-optim-fully-reshardable"
    return (
        Target("another data parallelism, the same buckets", "yes", f"{_DIST} {_SHARDED}"),
        Target("another tensor, pipeline or expert parallelism", "no", other),
        Target("plain storage", "no", other),
        Target("Megatron-FSDP", "no", f"it takes {fsdp_dtensor.FORMAT}"),
        *_other_optimizers(saved),
    )


def _other_optimizers(saved: Saved) -> tuple[Target, ...]:
    kinds = {entry.kind for entry in saved.entries if entry.kind is not None}
    these = ", ".join(sorted(kinds - {MAIN_OF_SHARDED, MAIN_OF_REPLICATED}))
    if not these:
        return (Target("any optimizer", "yes", "it starts fresh"),)
    adams = "it starts fresh; Muon's momentum from Adam's: --checkpoint-momentum-from-adam"
    return (
        Target(f"an optimizer without {these}", "yes", adams),
        Target("one with some of these alone", "yes", "what it has no use for is left out"),
        Target("one with some of these and others", "no", f"to start those fresh: {_FRESH} KINDS"),
    )


def _same_layout(saved: Saved) -> tuple[Target, ...]:
    sharded = saved.argument("use_distributed_optimizer")
    flags = f"--ckpt-format {rank_files.FORMAT}" + (f" {_SHARDED}" if sharded else "")
    other = f"only {TORCH_DIST} can: load it here and save it with {_DIST} --save FOLDER"
    return (
        Target("the layout, storage and optimizers that wrote it", "yes", flags),
        Target("another layout, storage or optimizer", "no", other),
    )


def _of_megatron_fsdp() -> tuple[Target, ...]:
    flags = f"{_FSDP} --ckpt-format {fsdp_dtensor.FORMAT}"
    return (
        Target("another sharding strategy, other numbers of ranks", "yes", flags),
        Target("DDP, torch FSDP2", "no", f"they take {TORCH_DIST}"),
    )


def _of_torch() -> tuple[Target, ...]:
    how = "set_optimizer_state_dict of torch.distributed.checkpoint.state_dict"
    return (
        Target("torch FSDP2 in your own program, any number of ranks", "yes", how),
        Target("Megatron's trainer", "no", f"it takes {TORCH_DIST}"),
    )
