"""Recording programs that know nothing of us: what is put into their processes, and what is made of what it writes.

`run` and `collect` are the instrument's side. The rest runs inside the program, under any Python from 3.10 on, with
torch and the standard library.
"""
