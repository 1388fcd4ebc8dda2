"""Training between organisations that do not trust each other: one process and one folder per data owner.

Reading order:

    identity, plan, membership, trust_store   key and certificate, agreed settings, joining, pinned certificates
    messages, tls, http1                      wire format, mutual TLS, HTTP/1.1 connections
    listener, limits, server, state           incoming connections and their limits, replies
    connections, client, attendance           outgoing connections, requests, roll call of a round
    transport, engine                         blocking interface to the network, `Engine` for one agent
    ledger, noise_log                         privacy budget, and proof that each noise draw is used once
    experiment, runner                        the experiment of one agent, its round loop and its results
    status, demo                              event log and status file, four local peers
"""
