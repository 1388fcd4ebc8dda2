"""Training between organisations that do not trust each other: one process per data owner, one folder each.

Read `identity` (key, certificate, card), `plan` (what everybody agreed on), `pins` (whose certificate is whose), `wire`
(messages and their checks), `transport` (mutual TLS), `sent` (the log that keeps noise from being drawn twice),
`engine` (deliver, reply and mix over the wire, and who is there), `task` (from plan and folder to an experiment), `run`
(the rounds), then `status`, `demo` and `commands`.
"""
