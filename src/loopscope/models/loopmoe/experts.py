"""torchtitan's grouped experts, computing in the dtype that their input has where the device can."""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.moe import GroupedExperts


@torch.library.custom_op("loopscope::grouped_mm_cpu", mutates_args=())
def _grouped_mm_cpu(A_ND: Tensor, B_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    # The fake-tensor rule of torch._grouped_mm refuses float32, so a compiled block cannot trace it; this op
    # is opaque to the compiler and runs the eager kernel.
    return torch._grouped_mm(A_ND, B_EDF, offs=offsets_E)


@_grouped_mm_cpu.register_fake
def _(A_ND: Tensor, B_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    return A_ND.new_empty((A_ND.shape[0], B_EDF.shape[-1]))


@torch.library.custom_op("loopscope::grouped_mm_cpu_backward", mutates_args=())
def _grouped_mm_cpu_backward(
    grad_NF: Tensor, A_ND: Tensor, B_EDF: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    grad_NF = grad_NF.contiguous()
    return (
        torch._grouped_mm(grad_NF, B_EDF.transpose(-2, -1), offs=offsets_E),
        torch._grouped_mm(A_ND.transpose(-2, -1), grad_NF, offs=offsets_E),
    )


@_grouped_mm_cpu_backward.register_fake
def _(grad_NF: Tensor, A_ND: Tensor, B_EDF: Tensor, offsets_E: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(A_ND), B_EDF.new_empty(B_EDF.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor, Tensor, None]:
    return (*_grouped_mm_cpu_backward(grad_NF, *ctx.saved_tensors), None)


_grouped_mm_cpu.register_autograd(_backward, setup_context=_setup_context)


class LoopGroupedExperts(GroupedExperts):
    """SwiGLU experts as grouped matmuls over expert-sorted tokens.

    torchtitan casts to bfloat16 whatever the training dtype. On CPU that would make float32 runs depend on how
    tokens are grouped, so here the matmul runs in the input's dtype; on CUDA, whose kernel is bfloat16 only,
    torchtitan's path is used unchanged.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """As torchtitan's."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Expert-sorted tokens [R, d] and their counts [E] → [R, d]."""
        if x_RD.device.type != "cpu":
            return cast(Tensor, super().forward(x_RD, num_tokens_per_expert_E))
        offsets_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        w1_EDF, w2_EFD, w3_EDF = (
            w.to(x_RD.dtype).transpose(-2, -1) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        h_RF = F.silu(self._grouped_mm(A=x_RD, B_t=w1_EDF, offs=offsets_E))
        h_RF = h_RF * self._grouped_mm(A=x_RD, B_t=w3_EDF, offs=offsets_E)
        return self._grouped_mm(A=h_RF, B_t=w2_EFD, offs=offsets_E)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        if A.device.type == "cpu":
            return cast(Tensor, _grouped_mm_cpu(A, B_t, offs))
        return cast(Tensor, super()._grouped_mm(A=A, B_t=B_t, offs=offs))
