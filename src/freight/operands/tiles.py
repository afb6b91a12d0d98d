"""Tiles at absolute positions: of the keys that attention reads, and of the tokens of a state.
Imports no torch.
"""

# Attention reads keys in tiles of this many, at absolute positions, so the sums of a row do not
# depend on where its chunk begins. A sliding window may begin inside a tile; the tile is read in
# full.
KEY_TILE = 64

# A block of states has a multiple of this many tokens. States are rounded at the ends of tiles of
# this size, at absolute positions, so stored states do not depend on where a chunk ends.
STATE_TILE = 16

# Lower bound of a row's log decay within a state's tile. exp of less is 0 in float32. Running sums
# of much lower values would lose the digits of later rows, and the differences of infinite sums
# would be NaN.
LEAST_DECAY = -104.0
