# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek-V4-style decoder over packed rows, and its training."""

import os

# OpenMP threads that wait for each other by spinning starve on cores that other processes use too: a step then takes ten times as long. Sleeping
# costs microseconds. The library reads this when torch loads it, so this package is imported before torch; a value that is set already stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
