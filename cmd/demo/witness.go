package demo

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fsnotify/fsnotify"
)

// witness writes down when sockets appear in folders and vanish from them. It watches all
// with one inotify instance, so that the order of its events is the kernel's.
type witness struct {
	watcher *fsnotify.Watcher
	report  func(Event)
}

func newWitness(report func(Event), dirs ...string) (*witness, error) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("cannot watch: %w", err)
	}
	for _, dir := range dirs {
		if err := watcher.Add(dir); err != nil {
			return nil, errors.Join(fmt.Errorf("cannot watch %s: %w", dir, err), watcher.Close())
		}
	}
	return &witness{watcher: watcher, report: report}, nil
}

// run works until ctx is done, and gives the watch back.
func (w *witness) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return w.watcher.Close()
		case err := <-w.watcher.Errors:
			return errors.Join(fmt.Errorf("cannot watch: %w", err), w.watcher.Close())
		case e := <-w.watcher.Events:
			switch {
			case e.Has(fsnotify.Create):
				w.report(Event{At: time.Now(), What: appeared, Socket: e.Name})
			case e.Has(fsnotify.Remove), e.Has(fsnotify.Rename):
				w.report(Event{At: time.Now(), What: vanished, Socket: e.Name})
			}
		}
	}
}
