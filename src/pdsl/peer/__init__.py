"""Training between organisations that do not trust each other: one process per data owner, one folder each.

Read `identity` (key, certificate, card), `plan` (what everybody agreed on), `pins` and `join` (whose certificate is
whose); `wire` (messages and their checks), `tls`, `node` and `server` (what a peer answers), `calls`, `roll`, `lines`
(what it asks), `transport` (all of that, for code that waits); `engine` (deliver, reply, mix, and who is there);
`sent`, `secrets`, `account` (noise is used once, and paid for); `task`, `run`, `outcome` (the rounds, and what they
come to); `status`, `commands`, `demo`.
"""
