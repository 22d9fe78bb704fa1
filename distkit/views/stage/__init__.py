"""The stage: messages on their way between ranks."""
