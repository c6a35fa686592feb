# SPDX-License-Identifier: Apache-2.0
"""The teacher of the lightning indexer and the KL to it, in log space: no epsilon stands anywhere.

Legend: R rows, H heads, K entries of the support.

full_csa:        Z = log(exp(sink) + sum over window + sum over support): the probabilities of the real attention.
compressed_only: Z = log(sum over support): every head weighs the same.
log t(j) = logsumexp over heads of (logit - Z), minus its own logsumexp over the support, so t sums to 1 (or is 0 without an entry).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import TEACHERS, Teacher


def relative_normaliser(z: Tensor) -> Tensor:
    """Z [R, H] minus its minimum over the heads: a constant per row cancels in the teacher, and small numbers keep their digits.

    A head with Z = +inf (sink +inf) stays removed; if that holds for all heads the limit of equal sinks is taken, which is a distribution still.
    """
    lowest = z.amin(-1, keepdim=True)
    return torch.where(torch.isfinite(lowest), z - lowest, 0)


def log_head_sum(logits: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
    """From logits [R, H, K] (-inf where invalid) and Z [R, H]: log of the head sum [R, K] and its logsumexp over K [R] (0 without an entry)."""
    head_sum = torch.logsumexp(logits - normaliser[..., None], 1)
    norm = torch.logsumexp(head_sum, -1)
    return head_sum, torch.where(norm == -torch.inf, 0, norm)


@torch.no_grad()
def teacher_distribution(logits: Tensor, non_compressed_lse: Tensor, valid: Tensor, teacher: Teacher = "full_csa") -> Tensor:
    """The distribution over the support that the indexer shall imitate, [R, K]; rows without a valid key are all 0. Never differentiated.

    Args:
        logits: [R, H, K], scaled, of the attention with the support's keys.
        non_compressed_lse: [R, H], log(exp(sink) + sum over the window of exp(logit)); unused by compressed_only.
        valid: bool [R, K].
        teacher: "full_csa" or "compressed_only"; ValueError otherwise.
    """
    check_teacher(teacher)
    if logits.dtype != torch.float64:
        logits = logits.float()
    masked = torch.where(valid[:, None, :], logits, -torch.inf)
    if masked.shape[2] == 0:
        return torch.zeros_like(masked[:, 0])
    z = torch.logsumexp(masked, -1)
    if teacher == "full_csa":
        z = torch.logaddexp(z, non_compressed_lse.to(z.dtype))
    head_sum, norm = log_head_sum(masked, relative_normaliser(z))
    return torch.exp(head_sum - norm[:, None])


def indexer_kl(student_logits: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
    """KL(teacher || softmax of student_logits over the valid slots) per row, [R]; 0 for rows without one.

    Differentiable in student_logits [R, K] (gradient softmax - teacher), not in teacher [R, K].
    """
    teacher = teacher.detach()
    some = valid.any(-1, keepdim=True)
    logits = torch.where(some, torch.where(valid, student_logits, -torch.inf), 0)
    log_student = torch.where(valid, torch.log_softmax(logits, -1), 0)
    teacher = torch.where(valid, teacher, 0)
    return (torch.xlogy(teacher, teacher) - teacher * log_student).sum(-1)


def check_teacher(teacher: str) -> None:
    """ValueError unless this is the name of a teacher."""
    if teacher not in TEACHERS:
        raise ValueError(f"unknown teacher {teacher!r}; legal: {', '.join(TEACHERS)}")
