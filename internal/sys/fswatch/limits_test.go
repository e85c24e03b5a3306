package fswatch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// TestLongestChainOfLinks checks that a path of 40 symbolic links is followed to its end, as by the
// kernel.
func TestLongestChainOfLinks(t *testing.T) {
	dir := tempDir(t)
	must(t, os.Symlink("end", filepath.Join(dir, "l1")))
	for i := 2; i <= 40; i++ {
		must(t, os.Symlink(fmt.Sprintf("l%d", i-1), filepath.Join(dir, fmt.Sprintf("l%d", i))))
	}
	w := start(t, func(*Watcher) {})
	s := subscribe(t, w.Subscribe, filepath.Join(dir, "l40"))
	defer s.Close()
	must(t, os.WriteFile(filepath.Join(dir, "end"), nil, 0o600))
	expectHint(t, s, "the end of the links was created")
}

// TestClosedSubscriptionIsNotPolled checks that nothing is polled any more when the only path that
// cannot be watched is closed.
func TestClosedSubscriptionIsNotPolled(t *testing.T) {
	w := start(t, func(w *Watcher) { w.open = func() (notifier, error) { return nil, errors.New("no inotify") } })
	a, b := subscribe(t, w.Subscribe, filepath.Join(tempDir(t), "a")), subscribe(t, w.Subscribe, filepath.Join(tempDir(t), "b"))
	within(t, "it is not polled", func() bool { return w.Polling() != "" })
	a.Close()
	if w.Polling() == "" {
		t.Error("one is left")
	}
	b.Close()
	if why := w.Polling(); why != "" {
		t.Errorf("polled: %s", why)
	}
}

// losingNotifier is one that loses a watch of a directory before it is noted.
type losingNotifier struct {
	*fakeNotifier
	w     *Watcher
	dir   string
	loses bool
}

func (n *losingNotifier) add(dir string, mask uint32) (int32, error) {
	wd, err := n.fakeNotifier.add(dir, mask)
	if dir != n.dir || !n.loses || err != nil {
		return wd, err
	}
	n.loses = false
	n.mu.Lock()
	delete(n.wds, dir)
	n.mu.Unlock()
	event := make([]byte, unix.SizeofInotifyEvent)
	binary.NativeEndian.PutUint32(event, uint32(wd))
	binary.NativeEndian.PutUint32(event[4:], unix.IN_IGNORED)
	n.w.dispatch(event)
	return wd, nil
}

// TestWatchThatIsLostAtOnce checks that a directory is watched again if the kernel removed its
// watch before the Watcher had noted it: the event about that says nothing to anybody.
func TestWatchThatIsLostAtOnce(t *testing.T) {
	dir := tempDir(t)
	n := &losingNotifier{fakeNotifier: deaf(), dir: dir}
	w := start(t, func(w *Watcher) {
		n.w = w
		w.open = func() (notifier, error) { return n, nil }
	})
	s := subscribe(t, w.Subscribe, filepath.Join(dir, "s"))
	defer s.Close()
	walked(t, s)
	n.loses = true
	w.walk(s.routes[0])
	n.mu.Lock()
	wd := n.wds[dir]
	n.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	if n.loses || wd == 0 || w.watches[wd] == nil {
		t.Errorf("lost %v, watch %d", !n.loses, wd)
	}
}

// notedNotifier notes what is removed, and calls a function after each add.
type notedNotifier struct {
	*fakeNotifier
	added   func(dir string) error // nil: nothing happens
	noted   sync.Mutex
	removed []int32
}

func (n *notedNotifier) add(dir string, mask uint32) (int32, error) {
	wd, err := n.fakeNotifier.add(dir, mask)
	if err == nil && n.added != nil {
		err = n.added(dir)
	}
	return wd, err
}

func (n *notedNotifier) remove(wd int32) {
	n.noted.Lock()
	defer n.noted.Unlock()
	n.removed = append(n.removed, wd)
}

func (n *notedNotifier) start(t *testing.T) *Watcher {
	return start(t, func(w *Watcher) { w.open = func() (notifier, error) { return n, nil } })
}

// TestCloseRemovesWatches checks that the kernel's watches go with the last subscription.
func TestCloseRemovesWatches(t *testing.T) {
	n := &notedNotifier{fakeNotifier: deaf()}
	w := n.start(t)
	s := subscribe(t, w.Subscribe, filepath.Join(tempDir(t), "s"))
	w.mu.Lock()
	watches := len(w.watches)
	w.mu.Unlock()
	if s.Close(); watches == 0 || len(n.removed) != watches {
		t.Errorf("%d of %d watches are removed", len(n.removed), watches)
	}
}

// TestCloseDuringAWalk checks that a watch is removed that is added after its subscription ended.
func TestCloseDuringAWalk(t *testing.T) {
	var s *Subscription
	dir, subscribed := tempDir(t), make(chan struct{})
	n := &notedNotifier{fakeNotifier: deaf(), added: func(at string) error {
		if at == dir {
			<-subscribed
			s.Close()
		}
		return nil
	}}
	w := n.start(t)
	s = w.Subscribe(filepath.Join(dir, "s"))
	close(subscribed)
	walked(t, s)
	n.mu.Lock()
	wd := n.wds[dir]
	n.mu.Unlock()
	expectEmpty(t, w)
	if !slices.Contains(n.removed, wd) {
		t.Errorf("removed %v, not %d", n.removed, wd)
	}
}

// TestDirectoryThatVanishesIsNotPolled checks that a directory that is gone, or replaced by a file,
// when it is to be watched is no reason to poll: the directory above reports that.
func TestDirectoryThatVanishesIsNotPolled(t *testing.T) {
	for err, polled := range map[error]bool{unix.ENOENT: false, unix.ENOTDIR: false, unix.EACCES: true} {
		// A watcher may open its descriptors while the next one counts those that are there.
		t.Run(err.Error(), func(t *testing.T) {
			dir := tempDir(t)
			n := &notedNotifier{fakeNotifier: deaf(), added: func(at string) error {
				if at == dir {
					return err
				}
				return nil
			}}
			w := n.start(t)
			s := subscribe(t, w.Subscribe, filepath.Join(dir, "s"))
			if why := w.Polling(); (why != "") != polled {
				t.Errorf("%q", why)
			}
			s.Close()
		})
	}
}

// TestHintWhenAFileSystemAnswersAgain checks that the end of a hang is a change.
func TestHintWhenAFileSystemAnswersAgain(t *testing.T) {
	w := start(t)
	s := subscribe(t, w.Subscribe, filepath.Join(tempDir(t), "s"))
	defer s.Close()
	w.mu.Lock()
	s.routes[0].hanging = true
	w.walkSoon(s.routes[0], false)
	w.mu.Unlock()
	expectHint(t, s, "it answers again")
}

// TestWritesBesideAnotherSubscription checks that the content of a file counts only for who asked
// for it, although the kernel has one watch for both; and that a path counts once.
func TestWritesBesideAnotherSubscription(t *testing.T) {
	file := filepath.Join(tempDir(t), "f")
	must(t, os.WriteFile(file, nil, 0o600))
	w := start(t)
	path, content := subscribe(t, w.Subscribe, file, file), subscribe(t, w.SubscribeDir, filepath.Dir(file))
	defer path.Close()
	defer content.Close()
	if len(path.routes) != 1 {
		t.Errorf("%d routes for one path", len(path.routes))
	}
	calm(path)
	must(t, os.WriteFile(file, []byte("x"), 0o600))
	expectHint(t, content, "a file was written")
	expectQuiet(t, path, "a file was written")
}
