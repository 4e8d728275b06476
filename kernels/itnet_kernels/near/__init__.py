"""Neighbourhoods: which keys are near to which queries, as blocks of pairs for the exact sum."""
