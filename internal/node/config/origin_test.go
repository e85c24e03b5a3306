package config

import (
	"fmt"
	"sync"
	"testing"
)

// A Result is asked for origins by many: doctor looks at all drivers at once.
func TestOriginForMany(t *testing.T) {
	r := one("[driver.a]\nsocket = \"/a\"\ntimeout = \"1m\"\n[driver.b]\nsocket = \"/b\"\ntimeout = \"2m\"\n")
	for range 20 {
		var wg sync.WaitGroup
		for _, name := range []string{"a", "b"} {
			for range 4 {
				wg.Go(func() {
					if at := r.Origin(fmt.Sprintf("driver.%q.timeout", name)); name == "a" && at != "f:3" {
						t.Errorf("the timeout of %s is from %s", name, at)
					}
				})
			}
		}
		wg.Wait()
	}
}
