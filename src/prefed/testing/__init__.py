"""Tests of methods: the laws that every method holds, and a federation whose runs have a closed form."""

from prefed.testing.all_laws import check_method, check_run
from prefed.testing.laws import (
    RULES,
    Problem,
    check_few_pairs,
    check_kind,
    check_messages,
    check_models,
    check_order,
    check_private_bytes,
    check_resume,
)
from prefed.testing.quadratics import Quadratic, QuadraticTrainer, Run, crowd, initial, simulate

__all__ = [
    "RULES",
    "Problem",
    "Quadratic",
    "QuadraticTrainer",
    "Run",
    "check_few_pairs",
    "check_kind",
    "check_messages",
    "check_method",
    "check_models",
    "check_order",
    "check_private_bytes",
    "check_resume",
    "check_run",
    "crowd",
    "initial",
    "simulate",
]
