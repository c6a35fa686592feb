# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek-V4-style decoder over packed rows, and its training."""

import os

# OpenMP threads that spin for long while they wait starve on cores that other processes use too: a step then takes ten times as long. Threads that
# sleep at once cost two thirds more time on idle cores. A spin of microseconds before sleeping loses neither. The library reads this when torch loads
# it, so this package is imported before torch; a policy that is set already stays.
if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
