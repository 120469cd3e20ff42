"""The 25 programs of `hard_programs.py`, by name."""

from hard import coordinates, geometry, probability, sequences, solvers
from hard.program import Program

PROGRAMS: dict[str, Program] = {
  **coordinates.PROGRAMS,
  **probability.PROGRAMS,
  **solvers.PROGRAMS,
  **sequences.PROGRAMS,
  **geometry.PROGRAMS,
}
