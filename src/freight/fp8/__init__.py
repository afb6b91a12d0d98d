"""Numbers: the formats of 8 and 4 bits, their scales, and the one cast."""
