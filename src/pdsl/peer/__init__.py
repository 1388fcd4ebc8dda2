"""Training between organisations that do not trust each other: one process and one folder per data owner.

Reading order:

    identity, plan, membership, trust_store   key and certificate, agreed settings, joining, pinned certificates
    messages, tls, server, client, attendance wire format, mutual TLS, replies, requests, roll call of a round
    transport, engine                         blocking interface to the network, `Engine` for one agent
    ledger, noise_log                         privacy budget, and proof that each noise draw is used once
    experiment, runner                        the experiment of one agent, its round loop and its results
    status, stderr_monitor, demo              event log and status file, failed TLS handshakes, four local peers
"""
