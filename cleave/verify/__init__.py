"""Checking blocks without computing them again; `check` says how."""

from cleave.verify.check import LONE, Fault, GemmCheck, Judgement
from cleave.verify.projection import Projector

__all__ = ["LONE", "Fault", "GemmCheck", "Judgement", "Projector"]
