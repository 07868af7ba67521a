"""The theory of distributed DPO (arXiv:2605.20696) as a calculator: its constants, statements and slips."""

from prefed.theory.constants import Constants
from prefed.theory.slips import SLIPS, Slip
from prefed.theory.statements import Bound, Statement, Term, statements

__all__ = ["SLIPS", "Bound", "Constants", "Slip", "Statement", "Term", "statements"]
