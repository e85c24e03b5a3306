package hostile

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Bait is a directory that no command may touch. Answers names what is in it.
type Bait struct {
	dir     string
	watch   int // an inotify descriptor
	ln      net.Listener
	done    chan struct{} // closed when nobody accepts any more
	dialled atomic.Int64
}

// NewBait fills an empty directory with a file, a socket and the contents of a kubelet's root
// directory, and watches it.
func NewBait(dir string) (*Bait, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, err
	}
	b := &Bait{dir: dir, watch: fd, done: make(chan struct{})}
	dirs := []string{"", "pods", "plugins", "plugins_registry"}
	for _, name := range dirs {
		err = errors.Join(err, os.MkdirAll(filepath.Join(dir, name), 0o755),
			os.WriteFile(filepath.Join(dir, name, "file"), []byte("#!/bin/sh\n# "+Secret+"\n"), 0o755))
	}
	if err == nil {
		b.ln, err = net.Listen("unix", filepath.Join(dir, "s"))
	}
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	go b.accept()
	for _, name := range dirs {
		_, watchErr := unix.InotifyAddWatch(fd, filepath.Join(dir, name), unix.IN_ALL_EVENTS)
		err = errors.Join(err, watchErr)
	}
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

func (b *Bait) accept() {
	defer close(b.done)
	for {
		c, err := b.ln.Accept()
		if err != nil {
			return
		}
		c.Close()
		b.dialled.Add(1)
	}
}

// Touched returns what was done in the directory since it was asked last: nil if nothing was.
func (b *Bait) Touched() error {
	buf := make([]byte, 4096)
	n, err := unix.Read(b.watch, buf)
	if err != unix.EAGAIN {
		return fmt.Errorf("a path of the daemon was touched: %d bytes of events, %v", n, err)
	}
	if n := b.dialled.Swap(0); n > 0 {
		return fmt.Errorf("%d connections to a path of the daemon", n)
	}
	return nil
}

// Close stops the watch. The directory stays.
func (b *Bait) Close() error {
	err := b.ln.Close()
	<-b.done
	return errors.Join(err, unix.Close(b.watch))
}
