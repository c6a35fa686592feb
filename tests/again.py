# SPDX-License-Identifier: Apache-2.0
"""A stand-in for what repeats an optimizer's update."""

from __future__ import annotations

from collections.abc import Callable

from csa_model.fused_update import FusedUpdate


class Again:
    """Prepares once for a key, and runs what it has then."""

    def __init__(self) -> None:
        self.key: object = None
        self.made: list[FusedUpdate] = []

    def __call__(self, name: str, key: object, prepare: Callable[[], FusedUpdate], /) -> None:
        if self.key != key:
            self.key = key
            self.made.append(prepare())
        self.made[-1].load()
        self.made[-1].run()
