"""What trainer and agent share: the memory, the socket, and the trainer's end of both.

memory          the arena: anonymous shared memory that outlives the trainer
protocol        every message between trainer and agent, and the version
message         what a message is, and how it becomes JSON and comes back
channel         how messages travel: length, JSON, file descriptors
client          the trainer's end: start the agent, send, listen, replace it when it dies
spawn           the agent as a child process
agent_deaths    how often agents died lately, and how long to wait
agent_address   the socket name by which a lingering agent is found
find_agents     agents of dead trainers, and what they hold
"""
