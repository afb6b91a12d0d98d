"""How attention walks the keys of a sequence. Imports no torch."""

# Keys are walked in tiles of this many, at absolute positions, so a row's sums do not depend on where its chunk begins.
# A sliding window begins somewhere inside a tile, which is read whole.
KEY_TILE = 64
