"""Training that goes on in seconds when a rank dies: ``Rescue``, and a watch over what ranks must have alike.

``rescue`` is what users call; ``nodes`` says which ranks share a memory and moves files between memories; ``memory`` is
the folder of a run in the memory of one node, which the launcher makes and removes; ``divergence`` compares ranks.
"""
