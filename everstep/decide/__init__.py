"""Pure knowledge: what to conclude and what to do, as functions of their arguments.

Nothing in this package reads a clock, draws a random number, opens a file or a socket, or imports a
library that does. Clocks, seeds and limits are arguments. That is what lets workflows call it
directly, tests enumerate it, and recorded incidents be decided again under another policy.
"""
