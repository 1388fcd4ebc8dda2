"""Training between organisations that do not trust each other: one process and one folder per data owner.

Reading order:

    identity, plan, membership, trust_store   key and certificate, agreed settings, joining, pinned certificates
    messages, receipts, tls, http1, streams   wire format, proof of rounds sent, mutual TLS, HTTP/1.1, ways to connect
    about, probe                              description of a peer of any version, calls that ask for it
    listener, limits, server, state           incoming connections and their limits, replies
    connections, calls                        outgoing connections, requests
    routes, dialling, relay                   members that cannot be called
    client, attendance, delays                rounds: roll call, exchange, limits on waiting
    transport, engine                         blocking interface to the network, `Engine` for one agent
    ledger, noise_log                         privacy budget, and proof that each noise draw is used once
    experiment, trainers, runner              the experiment of one agent, its round loop and its results
    status, log_lines, termination, demo      event log and status file, log on stderr, SIGTERM, four local peers
    doctor, health, recovery                  checks for operators, and the ledger of an older copy
"""
