"""Files of one node for another, over the network.

server        serves this node's files
fetch         reads files and answers of another node
connections   the agents of the other ranks
request       what a request may name
peer_frames   one connection, at both ends
tls           TLS between nodes
"""
