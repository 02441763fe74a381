"""The alphabet of dimensions, in one place, and the array types made of it.

====  ==========================================  ====  ================================================
B     rows of the batch                           N     query heads
T     tokens in this call                         G     key/value heads (N = G * R)
S     slots of a cache                            H     width of one head
D     width of the residual stream                F     width of an MLP or of one expert
V     vocabulary                                  E     experts of a layer
P     proposal: anchor + P-1 drafts               K     experts chosen per token
A     taps (layers whose output the drafter sees) L     layers
O     output buffer of a row, in tokens           W     sliding window, in tokens, the query included
====  ==========================================  ====  ================================================

Suffixes on local names follow it (``q_BTNH``), and so do the einsum strings. ``jaxtyping`` checks the
signatures that use these types while the tests run (``tests/conftest.py`` installs its import hook).
"""

from jaxtyping import Array, Bool, Float, Int, Key, Num, Shaped, UInt, UInt8

__all__ = ["Array", "Bool", "Float", "Int", "Key", "Num", "Shaped", "UInt", "UInt8"]
