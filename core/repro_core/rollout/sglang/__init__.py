"""SGLang as a rollout engine: in this process, as a server, behind a router."""
