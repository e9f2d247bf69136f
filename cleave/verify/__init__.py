"""Check result blocks without repeating the matrix multiplication.

`cleave.verify.check` describes the method.
"""

from cleave.verify.check import LONE, Fault, GemmCheck, Judgement
from cleave.verify.projection import Projector

__all__ = ["LONE", "Fault", "GemmCheck", "Judgement", "Projector"]
