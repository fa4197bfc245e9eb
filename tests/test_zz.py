import asyncio, os, subprocess, sys, threading, time
from hypothesis import given, strategies as st
def test_ok(): pass
@given(st.integers())
def test_h(x): assert x == x
def test_fd(): os.open("/etc/hosts", os.O_RDONLY)
def test_thread(): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def test_child():
    subprocess.run([sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep','50'], start_new_session=True)"])
def test_child2(): globals()["p"] = subprocess.Popen(["sleep", "50"])
def test_memfd():
    import mmap
    fd=os.memfd_create("everstep-x"); os.ftruncate(fd, 4096); globals()["m"]=mmap.mmap(fd, 4096); os.close(fd)
def test_torch():
    import torch
    torch.randn(300,300)@torch.randn(300,300)
    import torch.nn as nn
    m=nn.Linear(3,3); m(torch.randn(2,3)).sum().backward()
def test_aio(): asyncio.run(asyncio.sleep(0))
