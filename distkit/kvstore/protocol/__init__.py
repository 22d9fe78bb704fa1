"""What a parameter server does, whoever carries its messages. Pure."""
