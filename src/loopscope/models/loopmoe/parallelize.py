"""FSDP2, recompute and per-block compile for the reference model; everything else is refused by name."""

from typing import Any

import spmd_types as spmd
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division, get_fsdp_reshard_after_forward_policy
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import RoPE
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from loopscope.models import cpu_compat

_STATE_NAMES: tuple[tuple[type[Module.Config], tuple[str, ...]], ...] = (
    (Linear.Config, ("weight", "bias")),
    (Embedding.Config, ("weight",)),
    (RMSNorm.Config, ("weight",)),
    (GroupedExperts.Config, ("w1_EFD", "w2_EDF", "w3_EFD")),
    (RoPE.Config, ("cache",)),
)


def annotate_state(config: Decoder.Config) -> None:
    """Declare every parameter and buffer replicated, which is what FSDP-only training means.

    The `spmd_types` backend refuses parameters without a declared layout. No activation layout is declared:
    tensor and context parallel are refused, so activations are plain local tensors.
    """
    replicated = dense_param_placement(tp=spmd.R)
    for config_type, names in _STATE_NAMES:
        for _, module_config, _, _ in config.traverse(config_type, recurse=True):
            module_config.sharding_config = ShardingConfig(state_shardings=dict.fromkeys(names, replicated))


def parallelize_loopmoe(
    model: Decoder,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointing.Config | None,
    dump_folder: str,
    cast_forward_inputs: bool = True,
) -> Decoder:
    """Apply recompute, per-block compile and FSDP2, in this order.

    Args:
        cast_forward_inputs: FSDP's mixed-precision policy casts floating-point inputs of every block. This is
            the setting under which FSDP rebuilds containers that are passed as keyword arguments.
    """
    if parallelism.spmd_backend == "spmd_types":
        model.parallelize(parallel_dims)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=cast_forward_inputs,
        )
    }
    if parallelism.spmd_backend == "spmd_types":
        options["mesh"], mesh_dims = resolve_fsdp_mesh(parallel_dims)
        if mesh_dims is not None:
            options["dp_mesh_dims"] = mesh_dims
    else:
        replicated = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
        options["mesh"] = parallel_dims.get_mesh([*replicated, "fsdp"])
    if training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()

    policy = parallelism.fsdp_reshard_after_forward
    reshard = get_fsdp_reshard_after_forward_policy(policy, pp_enabled=False)
    fully_shard(model.tok_embeddings, **options, reshard_after_forward=reshard)
    for name, block in model.layers.items():
        # A shared block runs R times: freeing it after each pass would mean R all-gathers each way.
        shared = name.startswith("loop_") and policy != "always"
        fully_shard(block, **options, reshard_after_forward=reshard and not shared)
    # They run last and would be gathered again at once.
    fully_shard([model.norm, model.lm_head], **options, reshard_after_forward=policy == "always")
    fully_shard(model, **options)
    # The objective is already divided by the global token count, so FSDP must sum gradients.
    disable_fsdp_gradient_division(model)
    cpu_compat.prepare_fsdp(model)
    return model
