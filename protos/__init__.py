"""Every contract between processes, and both ends of the internal link.

Contracts: `messages`, `codec`, `draft_tree` (the walk both ends make), `worker` (what an engine is)
and the public API under `paceline`. Beside them lives the runtime of a worker, `host`,
`engine_thread` and `session` over `frames`: both worker packages need it and may not import each
other, and the orchestrator hosts an engine in its own process by the same thread. Nothing here
knows a model or imports torch.
"""
