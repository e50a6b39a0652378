"""Plans in integers; patterns count their pairs by the tiles, which are a floor above them."""

from .patterns import Pattern
from .plans import pairs_of_row

Pattern.count_pairs = staticmethod(pairs_of_row)
