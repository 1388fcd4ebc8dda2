"""Private, serverless, peer-to-peer machine learning."""
