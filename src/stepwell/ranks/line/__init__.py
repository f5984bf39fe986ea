"""Messages between rank 0 and the others at any time, while training runs. Nobody waits for them.

line              the interface: send, receive, who is lost
line_tree         who is connected to whom
line_meeting      how ranks find each other and prove who they are
line_hub          the thread at one rank
line_door         lets ranks in
line_connection   one connection, without blocking
line_frame        one message
"""
