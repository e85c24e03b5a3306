package control

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/test/fake"
)

// TestWatchThatIsLeft checks that a client that does not want more documents ends its connection,
// although its context goes on.
func TestWatchThatIsLeft(t *testing.T) {
	path, _ := served(t, newDaemon())
	fake.CheckLeaks(t)
	for range 3 {
		for _, err := range NewClient(path).Watch(context.Background()) {
			if err != nil {
				t.Error(err)
			}
			break
		}
	}
}

// TestFullQueue checks what a client reports that the daemon does not accept.
func TestFullQueue(t *testing.T) {
	path := filepath.Join(fake.ShortDir(t), "control.sock")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	for {
		c, err := net.Dial("unix", path)
		if err != nil {
			break // the queue is full
		}
		defer c.Close()
	}
	if _, err := NewClient(path).Status(t.Context()); err == nil || !strings.Contains(err.Error(), "too many clients are waiting") {
		t.Errorf("%v", err)
	}
}

// TestLargestAnswer checks that a document of as many objects as are allowed is read, and no larger
// one.
func TestLargestAnswer(t *testing.T) {
	for n, ok := range map[int]bool{maxObjects: true, maxObjects + 1: false} {
		doc := `{"unknown":[` + strings.Repeat("{},", n-2) + `{}]}`
		if _, err := decode([]byte(doc)); (err == nil) != ok {
			t.Errorf("%d objects: %v", n, err)
		}
	}
}

// TestAnswerThatDoesNotEnd checks that a command does not wait for the rest of an answer.
func TestAnswerThatDoesNotEnd(t *testing.T) {
	path := filepath.Join(fake.ShortDir(t), "control.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			_, _ = http.ReadRequest(bufio.NewReader(c)) // an answer before it is refused
			_, _ = c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"))
		}
	}()
	c := &Client{path: path, limit: 50 * time.Millisecond}
	if _, err := c.Status(t.Context()); err == nil || !strings.Contains(err.Error(), "its answer did not end within 100ms") {
		t.Errorf("%v", err)
	}
}
