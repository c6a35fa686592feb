# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek-V4-style decoder over packed rows, and its training."""
