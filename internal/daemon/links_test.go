package daemon

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"csi-registrar/internal/node/config"
)

// TestLinkedDropIn checks that an edit of the target of a drop-in that is a link takes effect, also
// one that comes after the files were read and before the target is watched.
func TestLinkedDropIn(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	target := filepath.Join(n.kubelet, "elsewhere.toml")
	edit := func(name string) {
		if err := os.WriteFile(target, []byte(n.table(name)), 0o644); err != nil {
			t.Error(err)
		}
	}
	edit("first.example")
	var once sync.Once
	c, _ := n.runWith(func(s config.Source) *config.Result {
		r := config.Load(s)
		if len(r.Links) > 0 {
			once.Do(func() { edit("second.example") })
		}
		return r
	})
	n.await(c, "the daemon", serves)
	if err := os.Symlink(target, n.path("conf.d/50-link.toml")); err != nil {
		t.Fatal(err)
	}
	n.await(c, "the edit before the target was watched", has("second.example"))
	edit("third.example")
	n.await(c, "the edit of the target", has("third.example"))
}
