# SPDX-License-Identifier: Apache-2.0
"""Evaluation of finished runs: the yardsticks of one checkpoint (`eval.evaluate`) and the comparison of arms (`eval.ab_report`)."""

import csa_model  # noqa: F401  # before torch: it sets how OpenMP threads wait
