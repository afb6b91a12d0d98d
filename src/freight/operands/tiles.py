"""Tiles at absolute positions: of the keys that attention reads, and of the tokens of a state.
Imports no torch.
"""

# Keys are walked in tiles of this many, at absolute positions, so a row's sums do not depend on
# where its chunk begins. A sliding window begins somewhere inside a tile, which is read whole.
KEY_TILE = 64

# A block of states has a multiple of this many tokens: a state is rounded where a tile of so many
# ends, at absolute positions, so what is stored does not depend on where a chunk ends.
STATE_TILE = 16

# What a row's log decay is at least, within a state's tile: exp of less is 0 in float32, and sums
# of much less would lose the digits of the rows behind. Beyond float32 their differences would be
# NaN.
LEAST_DECAY = -104.0
