package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fsnotify/fsnotify"

	"csi-registrar/internal/test/fake"
)

// socketWatcher reports when sockets appear in directories and are removed from them. One inotify
// instance watches all of them, so that the events are in order.
type socketWatcher struct {
	watcher *fsnotify.Watcher
	report  func(fake.Event)
}

func newSocketWatcher(report func(fake.Event), dirs ...string) (*socketWatcher, error) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("cannot watch: %w", err)
	}
	for _, dir := range dirs {
		if err := watcher.Add(dir); err != nil {
			return nil, errors.Join(fmt.Errorf("cannot watch %s: %w", dir, err), watcher.Close())
		}
	}
	return &socketWatcher{watcher: watcher, report: report}, nil
}

// run reports events until ctx is done.
func (w *socketWatcher) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return w.watcher.Close()
		case err := <-w.watcher.Errors:
			return errors.Join(fmt.Errorf("cannot watch: %w", err), w.watcher.Close())
		case e := <-w.watcher.Events:
			switch {
			case e.Has(fsnotify.Create):
				w.report(fake.Event{At: time.Now(), What: appeared, Registration: fake.Registration{Socket: e.Name}})
			case e.Has(fsnotify.Remove), e.Has(fsnotify.Rename):
				w.report(fake.Event{At: time.Now(), What: removed, Registration: fake.Registration{Socket: e.Name}})
			}
		}
	}
}
