"""What is kept where: levels, redundancy across nodes, and the transport between them."""
