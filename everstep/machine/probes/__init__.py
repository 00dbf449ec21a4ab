"""Real-time checks of one machine: each probe looks at one thing and yields observations.

A probe never decides about a job and never blocks its caller for longer than it promises; whoever
runs several (``runner``) gives each its interval and its deadline. Roots of file trees and clocks
are arguments, so that tests show a probe a machine of their own.

Not here: what follows from an observation (``everstep.decide``), and events (the agent).
"""
