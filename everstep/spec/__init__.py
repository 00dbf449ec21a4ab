"""Models of everything that crosses a border: job spec, policy, messages, the agent's API.

They live here and not in ``config/`` because users launch from repositories that have a ``config``
package of their own. ``config/`` holds only what an operator edits.
"""
